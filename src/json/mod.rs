//! An iterative push tokenizer for JSON (RFC 8259): no recursion, no tree.
