"""Worker processes of the trainer: they outlive the SIGTERM that a launcher sends to the whole process group."""
