"""Is what the package promises true: resumes, sizes, verdicts, predictions?"""
