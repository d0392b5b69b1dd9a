//! Functions of a library that is opened at run time. A table declares each once: a field, its type, and its name in the library.
//!
//! Trade-off: the compiler does not check the types against the library's header.

/// Declares a struct of functions with `look_up`, which fails with [`CudaError::BrokenLibrary`](crate::CudaError::BrokenLibrary) if one is missing;
/// those under `optional` may be. The types must be the declarations of the library's header, with its enums as the integers that they are in C. What
/// is looked up stays valid: an [`Opened`](crate::libraries::Opened) library is never unloaded.
macro_rules! symbols {
    (
        $(#[$attribute:meta])*
        $struct_vis:vis struct Symbols of $library:ident {
            $($vis:vis $field:ident: $type:ty = $name:literal,)*
        }
        optional { $($optional:ident: $optional_type:ty = $optional_name:literal,)* }
    ) => {
        $(#[$attribute])*
        $struct_vis struct Symbols {
            $($vis $field: $type,)*
            $($optional: Option<$optional_type>,)*
        }

        impl Symbols {
            $struct_vis fn look_up(opened: &crate::libraries::Opened) -> Result<Self, CudaError> {
                let library = &crate::library::$library;
                // SAFETY: the types are the header's, with which the author of the table compared them.
                unsafe {
                    Ok(Self {
                        $($field: opened.function(library, $name)?,)*
                        $($optional: opened.function(library, $optional_name).ok(),)*
                    })
                }
            }
        }
    };
}

pub(crate) use symbols;
