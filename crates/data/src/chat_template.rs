//! Chat templates: Jinja as transformers runs it, and which of a tokenizer's templates applies.
//!
//! Files, from the bottom: `python_compat` and `python_methods` (what Python writes and its methods), `filters`
//! (Jinja's), `generation` (`{% generation %}` blocks), `engine` (the environment and its limits), `template`, `built_in`,
//! `template_select`. Not supported: messages with images or sound.

mod built_in;
mod engine;
mod filters;
mod generation;
mod python_compat;
mod python_methods;
mod template;
mod template_select;

pub(crate) use built_in::BuiltIn;
pub use template::{ChatTemplate, Message, TemplateDefaults, TemplateInput};
pub(crate) use template::{REASONING, RenderInput, to_value};
pub use template_select::TemplateChoice;
pub(crate) use template_select::TemplateSet;
