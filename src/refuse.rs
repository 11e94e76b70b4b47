//! Every early end of a request: what the client is told, the log says, whose fault it was.
