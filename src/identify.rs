//! Who asks: API key -> tenant.
