"""How fast are batches loaded?"""
