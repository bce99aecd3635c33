"""What each command of ``kvboost-rag`` takes, does and prints."""
