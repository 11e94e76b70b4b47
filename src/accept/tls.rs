//! Certificates of the listener, and their renewal without losing streams.
//!
//! The rustls configuration is fixed for the life of the listener; only the certificate that it resolves
//! to is replaced, so open connections and session tickets remain valid. A renewal that cannot be read,
//! or whose key does not match, changes nothing.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use rustls::ServerConfig;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

use super::detect::VERSIONS;
use super::settings::Tls;
use super::settings::pem::{PemError, certified, provider};
use crate::clock::Clock;

/// Why a certificate cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("cannot read {file}")]
    Unreadable {
        /// The file.
        file: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A file has no certificate.
    #[error("{file} has no PEM certificate in it")]
    NoCertificate {
        /// The file.
        file: PathBuf,
    },
    /// A file has no private key.
    #[error("{file} has no PEM private key in it")]
    NoKey {
        /// The file.
        file: PathBuf,
    },
    /// The key belongs to another certificate.
    #[error("the key in {key} is not that of the certificate in {certificate}")]
    NotAPair {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's file.
        key: PathBuf,
    },
    /// Certificate and key are of an unsupported kind.
    #[error("the certificate of {file} cannot be used with its key")]
    Unfit {
        /// The certificate's file.
        file: PathBuf,
        /// rustls' error.
        source: rustls::Error,
    },
}

/// The current certificate for new connections.
pub struct Certificates {
    current: ArcSwap<CertifiedKey>,
    /// Its files, and the hash of their contents.
    source: Mutex<(Tls, blake3::Hash)>,
}

impl fmt::Debug for Certificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificates").field("files", &self.source.lock().0).finish_non_exhaustive()
    }
}

impl ResolvesServerCert for Certificates {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current.load_full())
    }
}

impl Certificates {
    /// Interval between checks of the files.
    pub const LOOK_EVERY: Duration = Duration::from_secs(10);

    /// Reads certificate and key.
    ///
    /// # Errors
    /// [`TlsError`], with the file that is at fault.
    pub fn load(tls: &Tls) -> Result<Arc<Self>, TlsError> {
        let (key, hash) = read(tls)?;
        Ok(Arc::new(Certificates { current: ArcSwap::from_pointee(key), source: Mutex::new((tls.clone(), hash)) }))
    }

    /// Reads the same files again. `Ok(true)` if new connections get another certificate from
    /// now on.
    ///
    /// # Errors
    /// [`TlsError`]; the old certificate stays.
    pub fn renew(&self) -> Result<bool, TlsError> {
        let tls = self.source.lock().0.clone();
        self.renew_from(&tls)
    }

    /// Reads other files, after a reload of the settings.
    ///
    /// # Errors
    /// [`TlsError`]; the old certificate stays.
    pub fn renew_from(&self, tls: &Tls) -> Result<bool, TlsError> {
        let (key, hash) = read(tls)?;
        let mut source = self.source.lock();
        let changed = source.1 != hash;
        *source = (tls.clone(), hash);
        if changed {
            self.current.store(Arc::new(key));
        }
        Ok(changed)
    }

    /// Checks the files every [`Certificates::LOOK_EVERY`], forever.
    pub(super) async fn keep_fresh(self: Arc<Self>, clock: Clock) {
        let mut told = false;
        loop {
            clock.sleep_until(Some(clock.now() + Self::LOOK_EVERY)).await;
            let certificates = Arc::clone(&self);
            // A hanging file system blocks a thread that does nothing else.
            let Ok(renewed) = tokio::task::spawn_blocking(move || certificates.renew()).await else { continue };
            match renewed {
                Ok(true) => tracing::info!("certificate renewed"),
                Ok(false) => {}
                Err(problem) if !told => {
                    tracing::warn!(%problem, "cannot renew the certificate; keeping the old one");
                    told = true;
                    continue;
                }
                Err(_) => continue,
            }
            told = false;
        }
    }

    /// The rustls configuration: HTTP/2 and HTTP/1.1 by ALPN, TLS 1.2 and 1.3.
    pub(super) fn server_config(self: &Arc<Self>) -> Arc<ServerConfig> {
        let builder = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .expect("the ring provider knows TLS 1.2 and 1.3");
        let mut config = builder.with_no_client_auth().with_cert_resolver(Arc::<Certificates>::clone(self));
        config.alpn_protocols = VERSIONS.map(|(name, _)| name.to_vec()).to_vec();
        Arc::new(config)
    }
}

/// Reads two short files, at start and on a timer or reload.
fn read(tls: &Tls) -> Result<(CertifiedKey, blake3::Hash), TlsError> {
    let certificates = file(&tls.certificate_file)?;
    let key = file(&tls.private_key_file)?;
    let mut hash = blake3::Hasher::new();
    hash.update(blake3::hash(&certificates).as_bytes()).update(blake3::hash(&key).as_bytes());
    let fit = certified(&certificates, &key).map_err(|bad| {
        let (file, key) = (tls.certificate_file.clone(), tls.private_key_file.clone());
        match bad {
            PemError::NoCertificate => TlsError::NoCertificate { file },
            PemError::NoKey => TlsError::NoKey { file: key },
            PemError::NotAPair => TlsError::NotAPair { certificate: file, key },
            PemError::Unfit(source) => TlsError::Unfit { file, source },
        }
    })?;
    Ok((fit, hash.finalize()))
}

/// Longer than any certificate or key, as for the settings' other files.
const LONGEST: u64 = 1 << 20;

fn file(path: &Path) -> Result<Vec<u8>, TlsError> {
    // Opening a named pipe would block until it has a writer.
    let bytes = std::fs::metadata(path).and_then(|found| match found.is_file() {
        true if found.len() <= LONGEST => std::fs::read(path),
        true => Err(std::io::Error::other("it is longer than 1 MiB")),
        false => Err(std::io::Error::other("it is no regular file")),
    });
    bytes.map_err(|source| TlsError::Unreadable { file: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::pin;
    use std::task::Poll;

    use super::*;
    use crate::accept::settings::Listen;
    use crate::accept::{ConnectionServer, Drain};

    fn write(dir: &Path, name: &str) -> Tls {
        let made = rcgen::generate_simple_self_signed([name.to_owned()]).unwrap();
        let tls = Tls { certificate_file: dir.join("cert.pem"), private_key_file: dir.join("key.pem") };
        std::fs::write(&tls.certificate_file, made.cert.pem()).unwrap();
        std::fs::write(&tls.private_key_file, made.signing_key.serialize_pem()).unwrap();
        tls
    }

    #[test]
    fn a_changed_file_is_a_renewal_and_an_unchanged_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let certificates = Certificates::load(&write(dir.path(), "a")).unwrap();
        let first = certificates.current.load_full().cert[0].clone();
        assert!(!certificates.renew().unwrap());
        write(dir.path(), "b");
        assert!(certificates.renew().unwrap());
        assert_ne!(certificates.current.load_full().cert[0], first);
    }

    #[test]
    fn a_bad_renewal_keeps_the_old_certificate() {
        let dir = tempfile::tempdir().unwrap();
        let tls = write(dir.path(), "a");
        let certificates = Certificates::load(&tls).unwrap();
        let first = certificates.current.load_full().cert[0].clone();
        std::fs::write(&tls.certificate_file, "nothing in here").unwrap();
        assert!(matches!(certificates.renew(), Err(TlsError::NoCertificate { .. })));
        let other = rcgen::generate_simple_self_signed(["c".to_owned()]).unwrap();
        std::fs::write(&tls.certificate_file, other.cert.pem()).unwrap();
        assert!(matches!(certificates.renew(), Err(TlsError::NotAPair { .. })), "half a renewal");
        std::fs::remove_file(&tls.private_key_file).unwrap();
        assert!(matches!(certificates.renew(), Err(TlsError::Unreadable { .. })));
        assert_eq!(certificates.current.load_full().cert[0], first);
        std::fs::write(&tls.private_key_file, other.signing_key.serialize_pem()).unwrap();
        assert!(certificates.renew().unwrap(), "the other half has come");
    }

    /// One blocking thread, taken by a read that hangs: the settings wait, and the runtime's thread does not.
    #[test]
    fn a_reload_reads_certificates_beside_the_threads_that_relay() {
        let dir = tempfile::tempdir().unwrap();
        let tls = write(dir.path(), "a");
        let certificates = Certificates::load(&tls).unwrap();
        let first = certificates.current.load_full().cert[0].clone();
        write(dir.path(), "b");
        let runtime = tokio::runtime::Builder::new_current_thread().max_blocking_threads(1).build().unwrap();
        runtime.block_on(async {
            let listen = Listen { tls: Some(tls), ..Listen::default() };
            let server = ConnectionServer::new(&listen, Some(&certificates), Drain::new(), Clock::start());
            let (answers, hangs) = std::sync::mpsc::channel::<()>();
            let hanging = tokio::task::spawn_blocking(move || hangs.recv().is_err());
            let mut reload = pin!(server.set_limits(&listen));
            let begun = poll_fn(|cx| Poll::Ready(reload.as_mut().poll(cx).is_ready())).await;
            assert!(!begun && certificates.current.load().cert[0] == first);
            drop(answers);
            assert!(hanging.await.unwrap());
            reload.await.unwrap();
            assert_ne!(certificates.current.load().cert[0], first);
        });
    }
}
