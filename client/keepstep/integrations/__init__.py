"""One module for each training framework. Each imports its framework only once that is used."""
