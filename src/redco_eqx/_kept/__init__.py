"""Compiled programs, kept from call to call while what they were traced from is the same."""
