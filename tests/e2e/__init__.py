"""End to end: real pytest runs in processes of their own, on CPU and gloo, looked at from outside."""
