"""What tests of several rooms share. Each folder has one subject."""
