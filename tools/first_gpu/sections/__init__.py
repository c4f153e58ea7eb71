"""What is asked: a module for each section, with `cases(device)`."""
