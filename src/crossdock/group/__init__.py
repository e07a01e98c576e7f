"""What a dispatcher knows of its peers: who they are, which call they are in, and who is to blame for a fault."""
