//! Parses a certificate and its key from PEM. Pure: the listener and the check of the settings read the
//! files and share this function.

use std::sync::Arc;

use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;

/// Error of a certificate or its key.
#[derive(Clone, Debug, PartialEq)]
pub enum PemError {
    /// No certificate in the first file.
    NoCertificate,
    /// No private key in the second file.
    NoKey,
    /// The key belongs to another certificate.
    NotAPair,
    /// Unusable for another reason, most likely a kind that rustls does not support.
    Unfit(rustls::Error),
}

/// Parses the PEM chain and key, and checks that they match.
///
/// # Errors
/// [`PemError`].
pub fn certified(certificates: &[u8], key: &[u8]) -> Result<CertifiedKey, PemError> {
    let chain: Vec<CertificateDer<'static>> =
        CertificateDer::pem_slice_iter(certificates).collect::<Result<_, _>>().map_err(|_| PemError::NoCertificate)?;
    if chain.is_empty() {
        return Err(PemError::NoCertificate);
    }
    let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| PemError::NoKey)?;
    CertifiedKey::from_der(chain, key, &provider()).map_err(|error| match error {
        rustls::Error::InconsistentKeys(_) => PemError::NotAPair,
        other => PemError::Unfit(other),
    })
}

/// The cryptography provider of the listener.
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pair_is_told_from_what_is_none() {
        let made = || rcgen::generate_simple_self_signed(["a".to_owned()]).unwrap();
        let (one, other) = (made(), made());
        let (certificate, key) = (one.cert.pem(), one.signing_key.serialize_pem());
        let read = |certificate: &str, key: &str| certified(certificate.as_bytes(), key.as_bytes()).map(drop);
        assert_eq!(read(&certificate, &key), Ok(()));
        assert_eq!(read("", &key), Err(PemError::NoCertificate));
        assert_eq!(read(&key, &key), Err(PemError::NoCertificate));
        assert_eq!(read(&certificate, &certificate), Err(PemError::NoKey));
        assert_eq!(read(&certificate, &other.signing_key.serialize_pem()), Err(PemError::NotAPair));
        let garbage = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        assert!(matches!(read(garbage, &key), Err(PemError::Unfit(_))), "{:?}", read(garbage, &key));
    }
}
