//! The classes by which the requests of a trace are judged.

use std::collections::HashMap;

use anyhow::Context;
use http::header::{HeaderMap, HeaderName, HeaderValue};

use super::options::ReplayArgs;
use crate::cli::service_options::ONLY_CLASS;
use crate::config::Settings;
use crate::forward::settings::Timeouts;
use crate::judge::Objectives;
use crate::load::LoadClass;
use crate::load::replay::ReplayClass;
use crate::types::{ClassId, Priority};

/// One class.
pub struct ReplayedClass {
    /// Name.
    pub id: ClassId,
    /// Priority in queues.
    pub priority: Priority,
    /// Objectives.
    pub objectives: Objectives,
    /// Time limits.
    pub timeouts: Timeouts,
}

/// All of them, and which one a request of the trace belongs to.
pub struct ReplayedClasses {
    /// The settings that they come from.
    pub settings: Option<Settings>,
    /// Classes, in the order of the settings.
    pub all: Vec<ReplayedClass>,
    by_name: HashMap<String, usize>,
    default: usize,
}

impl ReplayedClasses {
    /// The classes of the settings, or the only one of the command line.
    ///
    /// # Errors The settings cannot be read, there are no objectives, or a class does not exist.
    pub fn of(args: &ReplayArgs) -> anyhow::Result<Self> {
        let Some(settings) = args.promise.settings()? else {
            let objectives = args.promise.objectives()?;
            let id = ClassId::from(args.promise.preset.as_deref().unwrap_or(ONLY_CLASS));
            let only = ReplayedClass { id, priority: Priority::Normal, objectives, timeouts: args.promise.timeouts() };
            return Ok(ReplayedClasses { settings: None, all: vec![only], by_name: HashMap::new(), default: 0 });
        };
        let class = |class: &std::sync::Arc<crate::config::ClassSettings>| ReplayedClass {
            id: class.id.clone(),
            priority: class.priority,
            objectives: class.objectives.clone(),
            timeouts: class.timeouts,
        };
        let all: Vec<ReplayedClass> = settings.classes.iter().map(class).collect();
        let by_name: HashMap<String, usize> =
            all.iter().enumerate().map(|(index, class)| (class.id.to_string(), index)).collect();
        let wanted = args.class.as_deref().unwrap_or(settings.default_class.as_str());
        let default = by_name.get(wanted).copied().with_context(|| {
            let names: Vec<&str> = all.iter().map(|class| class.id.as_str()).collect();
            format!("--class {wanted} does not exist; classes are {}", names.join(", "))
        })?;
        Ok(ReplayedClasses { settings: Some(settings), all, by_name, default })
    }

    /// The class of a request, and whether the named one exists. Without settings there is only one.
    pub fn index_of(&self, name: Option<&str>) -> (usize, bool) {
        let Some(name) = name.filter(|_| self.settings.is_some()) else { return (self.default, true) };
        self.by_name.get(name).map_or((self.default, false), |index| (*index, true))
    }

    /// The classes for the score.
    pub fn scored(&self) -> Vec<ReplayClass> {
        let scored =
            |class: &ReplayedClass| ReplayClass { name: class.id.to_string(), target: class.objectives.joint_target };
        self.all.iter().map(scored).collect()
    }

    /// How they are sent to a service.
    ///
    /// # Errors
    /// The header is none.
    pub fn sent(&self, class_header: Option<&str>) -> anyhow::Result<Vec<LoadClass>> {
        let header = class_header.map(|name| {
            name.parse::<HeaderName>().with_context(|| format!("--class-header: {name:?} is not a header name"))
        });
        let header = header.transpose()?;
        let sent = |class: &ReplayedClass| {
            let mut headers = HeaderMap::new();
            if let Some(name) = &header {
                headers.insert(name.clone(), HeaderValue::from_str(class.id.as_str())?);
            }
            let (id, objectives, timeouts) = (class.id.clone(), class.objectives.clone(), class.timeouts);
            anyhow::Ok(LoadClass { id, objectives, timeouts, headers })
        };
        self.all.iter().map(sent).collect()
    }
}
