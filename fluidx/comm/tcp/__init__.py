"""Ranks on several hosts that are connected by TCP: the message layer, the interfaces of a host, and how ranks connect."""
