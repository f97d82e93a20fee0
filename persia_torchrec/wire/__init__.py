"""Bytes on the network: messages, transport, the job's address book."""
