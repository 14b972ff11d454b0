"""What every host does: report its state to the leader, and carry out its orders."""
