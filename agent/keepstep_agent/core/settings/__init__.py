"""Every setting: its default, its names, how it is parsed, and which combinations are refused."""
