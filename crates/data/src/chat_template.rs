//! Chat templates: Jinja as transformers runs it, and the choice among a tokenizer's templates.
//!
//! Files, from the bottom: `allocator`, `python_compat` and `python_methods` (Python's output and methods), `dict` and `filters` (Jinja's), `lexer` (sources), `engine` (the environment and its limits), `template`, `rendered_chat`, `built_in`, `template_select`. Not supported: messages with
//! images or sound.

mod allocator;
mod built_in;
mod dict;
mod engine;
mod filters;
mod lexer;
mod python_compat;
mod python_methods;
mod rendered_chat;
mod template;
mod template_select;

pub use allocator::BoundedAllocator;
pub(crate) use built_in::BuiltIn;
pub(crate) use engine::within_deadline;
pub(crate) use rendered_chat::RenderedChat;
pub(crate) use template::REASONING;
pub use template::{ChatTemplate, TemplateDefaults};
pub use template_select::TemplateChoice;
pub(crate) use template_select::TemplateSet;
