"""What all services share: starting and stopping a gRPC server, deadlines, and the table of status codes."""
