"""What people see: events, the story on the terminal, TensorBoard, the report."""
