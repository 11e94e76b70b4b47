//! The closed set of outcomes (`docs/semantics.md`, section 4).

macro_rules! reasons {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $name { $($(#[$vdoc])* $variant,)* }

        impl $name {
            /// Every reason, in the order of the documentation.
            pub const ALL: &'static [$name] = &[$($name::$variant,)*];

            /// The number of reasons.
            pub const COUNT: usize = Self::ALL.len();

            /// The label value.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $($name::$variant => $text,)* }
            }
        }
    };
}

reasons! {
    /// Why a request missed; the service's fault.
    Missed {
        /// The TTFT objective broke first.
        Ttft = "ttft",
        /// The TPOT objective broke first.
        Tpot = "tpot",
        /// The ITL objective broke first.
        Itl = "itl",
        /// The E2E objective (or the derived budget) broke first.
        E2e = "e2e",
        /// The engine failed, or gave a response that no other reason explains.
        UpstreamError = "upstream_error",
        /// The engine pushed back (429, 503, 529) after the retries allowed.
        UpstreamOverload = "upstream_overload",
        /// No engine could be reached.
        UpstreamUnavailable = "upstream_unavailable",
        /// The body ended before `finish`.
        Truncated = "truncated",
        /// Finished without any token and without a finish reason.
        Empty = "empty",
        /// The first-token (or response-head) limit fired.
        TimeoutFirstToken = "timeout_first_token",
        /// The idle limit fired.
        TimeoutIdle = "timeout_idle",
        /// The total limit fired.
        TimeoutTotal = "timeout_total",
        /// The gateway rejected or dropped it for lack of capacity.
        Shed = "shed",
        /// The client left after an objective was already broken.
        CanceledLate = "canceled_late",
        /// The response could not be inspected.
        Unparseable = "unparseable",
        /// A failure of the gateway.
        Internal = "internal",
    }
}

reasons! {
    /// Why a request is not counted; not the service's fault.
    Excluded {
        /// The client left before an objective was broken.
        ClientCancel = "client_cancel",
        /// The client did not read.
        ClientLimited = "client_limited",
        /// The request was invalid.
        InvalidRequest = "invalid_request",
        /// No key, an unknown key, or a class the tenant may not use.
        Unauthorized = "unauthorized",
        /// The tenant's own limit.
        RateLimited = "rate_limited",
        /// The body did not arrive in time.
        SlowUpload = "slow_upload",
        /// The class excludes non-streaming responses, or has nothing to judge them by.
        NonStreaming = "non_streaming",
        /// The path is not judged.
        Unjudged = "unjudged",
    }
}

/// How a request ended. Every accepted request has exactly one outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Outcome {
    /// Finished, and all applicable objectives held on this request.
    Met,
    /// The service's fault.
    Missed(Missed),
    /// Not the service's fault.
    Excluded(Excluded),
}

impl Outcome {
    /// The label value of `outcome`: `met`, `missed`, `excluded`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Outcome::Met => "met",
            Outcome::Missed(_) => "missed",
            Outcome::Excluded(_) => "excluded",
        }
    }

    /// The label value of `reason`; empty for met.
    #[must_use]
    pub const fn reason(self) -> &'static str {
        match self {
            Outcome::Met => "",
            Outcome::Missed(reason) => reason.as_str(),
            Outcome::Excluded(reason) => reason.as_str(),
        }
    }

    /// Whether it counts in `slo_total`.
    #[must_use]
    pub const fn is_judged(self) -> bool {
        !matches!(self, Outcome::Excluded(_))
    }
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Outcome::Met => f.write_str("met"),
            other => write!(f, "{}({})", other.as_str(), other.reason()),
        }
    }
}
