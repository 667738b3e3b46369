"""The services, and `compute`, which those that run models share. They import `common` and never each other."""
