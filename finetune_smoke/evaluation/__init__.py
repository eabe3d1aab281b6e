"""What a trained model is asked afterwards: held-out loss, real generation, the time of one forward."""
