"""What several test files need: witnesses outside of the process, and processes that can be killed."""
