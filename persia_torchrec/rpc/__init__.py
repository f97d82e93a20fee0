"""Requests over a channel: messages, client, server, authentication."""
