"""Bridges to other runtimes; each is imported only where it is asked for."""
