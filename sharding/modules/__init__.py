"""What is done with any module of torch: its state, copies, wrappers, and whether its values are finite."""
