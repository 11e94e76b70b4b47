//! YAML -> checked settings, all problems at once; reload.
