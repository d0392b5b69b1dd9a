//! Tokens that a recipe adds to its model: what the plan sees of them, and whether an adapter to continue from agrees.
//!
//! Trade-off: where a run adds tokens, the tokenizer is read a second time before a run that starts from an adapter.

use std::path::Path;

use firebrick_arch::ModelConfig;
use firebrick_data::Tokenizer;

use crate::config::RunConfig;
use crate::error::RunError;

/// Gives the model the rows of the tokens that the tokenizer got, and the recipe's adapter these rows to train. Returns the recipe that
/// the plan sees; what was typed stays as it is.
///
/// # Errors
/// A tokenizer that had more tokens than the model has rows, or `lora.modules_to_save` that names one of two tables that are one.
pub(crate) fn planned(
    recipe: &RunConfig,
    tokenizer: &Tokenizer,
    model: &mut ModelConfig,
) -> Result<RunConfig, RunError> {
    let ids: Vec<usize> = tokenizer.new_tokens().iter().map(|token| token.id as usize).collect();
    let (tokens, rows) = (ids.first().copied().unwrap_or(tokenizer.vocab_size()), model.spec.vocab_size);
    if tokens > rows {
        return Err(RunError::VocabularyTooSmall { tokenizer: tokens, model: rows });
    }
    let mut planned = recipe.clone();
    if let Some(lora) = &mut planned.lora {
        *lora = lora.with_new_tokens(&ids, &model.spec)?;
    }
    model.add_tokens(&ids);
    Ok(planned)
}

/// Checks that an adapter folder which has a tokenizer gives the new tokens the ids that they have here: its rows are theirs.
///
/// # Errors
/// A tokenizer that cannot be read, or [`RunError::OtherTokens`].
pub(crate) fn check_adapter_tokens(adapter: &Path, tokenizer: &Tokenizer) -> Result<(), RunError> {
    if tokenizer.new_tokens().is_empty() || !adapter.join("tokenizer.json").is_file() {
        return Ok(());
    }
    let theirs = Tokenizer::from_folder(adapter)?;
    for token in tokenizer.new_tokens() {
        let id = theirs.token_to_id(&token.content);
        if id != Some(token.id) {
            let (adapter, token, here) = (adapter.to_path_buf(), token.content.clone(), token.id);
            return Err(RunError::OtherTokens { adapter, token, here, there: id });
        }
    }
    Ok(())
}
