//! Goes and looks at engines.
