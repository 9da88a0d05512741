"""The planes of a session: channels carry commands, CCLs carry arrays."""
