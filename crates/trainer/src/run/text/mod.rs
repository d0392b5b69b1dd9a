//! Text from a model folder, and what travels with a model for that: chat settings, the tokens that end a turn, how answers are sampled.

pub mod chat_settings;
pub mod end_of_turn;
pub mod generate;
pub mod sampling;
pub mod text_stream;
pub mod verify;
