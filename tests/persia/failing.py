"""What a process of the helper's tests does that fails; it imports nothing."""


def send_nothing():
    raise ValueError("there is no data")
