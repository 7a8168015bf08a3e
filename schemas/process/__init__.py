"""Processes: cores, memory and allocator; notices and critical sections at shutdown; commands as steps in processes."""
