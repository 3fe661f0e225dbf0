"""Prints which Python the tests use."""
import sys

print(sys.executable)
