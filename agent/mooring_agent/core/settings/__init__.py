"""Every setting: its default, its names, how it is read, and which combinations are refused."""
