"""How do I start: ranks on this machine."""
