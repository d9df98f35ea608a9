"""The rules of the directory watch: when a checkpoint that nothing announces is complete."""
