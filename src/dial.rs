//! Opens a TCP or TLS connection to an engine: the one seam that tests replace.
