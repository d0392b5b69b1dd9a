//! Kernel parameters that a CUDA source declares, for comparison with the arguments of launches.
//!
//! Not supported: types that are not a pointer, `int`, `long long`, `float` or a struct, and other names of those.

/// Kinds of parameters that launches could confuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Pointer,
    /// 4 bytes, signed or unsigned.
    Int,
    /// 8 bytes, signed or unsigned.
    Long,
    Float,
    Struct,
}

#[cfg_attr(not(debug_assertions), allow(dead_code, reason = "only debug builds compare them"))]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Parameter {
    /// Empty if it has no name.
    pub(super) name: String,
    pub(super) kind: Kind,
}

impl Parameter {
    /// Parses a declaration; `None` if there is none.
    fn read(declaration: &str) -> Option<Self> {
        let is_name = |character: char| character.is_alphanumeric() || character == '_';
        let declaration =
            declaration.trim_end_matches(|character: char| character.is_whitespace() || character == '\\');
        let names = declaration.split(|character| !is_name(character)).filter(|word| !word.is_empty());
        let mut words: Vec<&str> = names.filter(|word| !matches!(*word, "const" | "__grid_constant__")).collect();
        if declaration.contains('*') {
            // The name of an array pointer is followed by its length.
            let end = declaration.find([')', '[']).unwrap_or(declaration.len());
            let name = declaration[..end].rsplit(|character| !is_name(character)).next().unwrap_or_default();
            return Some(Self { name: name.to_owned(), kind: Kind::Pointer });
        }
        let name = if words.len() > 1 { words.pop().unwrap_or_default() } else { "" };
        let kind = match words.as_slice() {
            [] => return None,
            ["int"] | ["unsigned"] => Kind::Int,
            ["long", "long"] | ["unsigned", "long", "long"] => Kind::Long,
            ["float"] => Kind::Float,
            _ => Kind::Struct,
        };
        Some(Self { name: name.to_owned(), kind })
    }
}

/// Returns the parameters that a source declares for the kernel of this name; `None` if it defines no such kernel, as for the mangled
/// names of templates. The name may be an argument of a macro that defines the kernel, or of one that takes such macros as arguments.
pub(super) fn parameters(source: &str, function: &str) -> Option<Vec<Parameter>> {
    declared_parameters(source, function).or_else(|| {
        let places = source.match_indices(function).filter_map(|(at, _)| argument_place(source, at, function.len()));
        places
            .flat_map(|(called, place)| called_macros(source, called).map(move |found| (place, found)))
            .find_map(|(place, found)| declared_parameters(found.body, found.parameters.split(',').nth(place)?.trim()))
    })
}

/// Iterates over the macros of a name: the one with that name, or all that are passed to others, if it is a parameter of those.
fn called_macros<'a>(source: &'a str, called: &'a str) -> impl Iterator<Item = Macro<'a>> {
    let is_defined = macros(source).any(|found| found.name == called);
    macros(source).filter(move |found| match is_defined {
        true => found.name == called,
        false => source.contains(&format!("({})", found.name)),
    })
}

/// Returns the [`parameters`] of a kernel that is defined by its name. They are separated by commas outside of brackets.
fn declared_parameters(source: &str, function: &str) -> Option<Vec<Parameter>> {
    let is_kernel = |at: usize| {
        let declaration = &source[source[..at].rfind([';', '}']).map_or(0, |end| end + 1)..at];
        is_word(source, at, function.len()) && ["KERNEL", "__global__"].iter().any(|word| declaration.contains(word))
    };
    source.match_indices(function).filter(|(at, _)| is_kernel(*at)).find_map(|(at, _)| {
        let list = source[at + function.len()..].strip_prefix('(')?;
        let (mut depth, mut start, mut found) = (0, 0, Vec::new());
        for (index, character) in list.char_indices() {
            match character {
                ')' if depth == 0 => {
                    found.extend(Parameter::read(&list[start..index]));
                    // A call has no body.
                    let rest = list[index + 1..].trim_start_matches(|c: char| c.is_whitespace() || c == '\\');
                    return rest.starts_with('{').then_some(found);
                }
                '(' | '<' | '[' => depth += 1,
                ')' | '>' | ']' => depth -= 1,
                ',' if depth == 0 => {
                    found.extend(Parameter::read(&list[start..index]));
                    start = index + 1;
                }
                _ => {}
            }
        }
        None
    })
}

/// Returns whether the name at `at` is a whole word.
fn is_word(source: &str, at: usize, length: usize) -> bool {
    let is_name = |character: char| character.is_alphanumeric() || character == '_';
    let (before, after) = (source[..at].chars().next_back(), source[at + length..].chars().next());
    !before.is_some_and(is_name) && !after.is_some_and(is_name)
}

/// Returns the callee that gets the name as an argument, and the argument's index; `None` if it is not an argument.
fn argument_place(source: &str, at: usize, length: usize) -> Option<(&str, usize)> {
    let open = source[..at].rfind('(')?;
    let (called, before) = (&source[..open], &source[open..at]);
    let is_argument = is_word(source, at, length) && !before.contains(')') && !source[at + length..].starts_with('(');
    let start =
        called.rfind(|character: char| !(character.is_alphanumeric() || character == '_')).map_or(0, |at| at + 1);
    is_argument.then(|| (&called[start..], before.matches(',').count()))
}

struct Macro<'a> {
    name: &'a str,
    parameters: &'a str,
    body: &'a str,
}

fn macros(source: &str) -> impl Iterator<Item = Macro<'_>> {
    source.split("#define ").skip(1).filter_map(|text| {
        let (name, rest) = text.split_once('(')?;
        let (parameters, rest) = rest.split_once(')')?;
        // The macro continues after a line that ends with a backslash.
        let end = rest.match_indices('\n').map(|(end, _)| end).find(|&end| !rest[..end].ends_with('\\'));
        let is_name = name.chars().all(|character| character.is_alphanumeric() || character == '_');
        is_name.then(|| Macro { name, parameters, body: &rest[..end.unwrap_or(rest.len())] })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_found_in_a_definition() {
        let source = "device int sum(int a);\nint twice(int x) { return sum(x) + sum(x); }\n\
            extern \"C\" __global__ void __launch_bounds__(64, 2)\n    sum(Pack<T, 4> *y, const float (*x)[2], int n) {}\n\
            extern \"C\" __global__ void nothing( ) {}";
        let count = |name| parameters(source, name).map(|found| found.len());
        assert_eq!([count("sum"), count("nothing")], [Some(3), Some(0)]);
        assert_eq!([count("twice"), count("um"), count("missing"), count("_Z3sumi")], [None; 4]);
    }

    #[test]
    fn parameters_are_found_where_macros_define() {
        let source = "#define CAST(NAME, E)   \\\n    KERNEL NAME(E *y, const float *x,  \\\n    int n) { cast(y, x, n); }\n\
            #define ROWS(WRITE, ROW)  \\\n    KERNEL ROW(int n) { each(n); }\n\
            #define WRITES(WRITE, ROW)  \\\n    KERNEL WRITE(int n, int m) { write(n, m); }\n\
            #define SCALED(NAME, E)   \\\n    KERNEL NAME(E *y) { scale(y); }\n\
            CAST(cast_bf16, bf16)\nSCALED(scaled_f16, f16)\n#define FORMATS(OF)  \\\n    OF(nf4_write, nf4_rows)\nFORMATS(ROWS)\nFORMATS(WRITES)\n";
        let counts = ["cast_bf16", "scaled_f16", "nf4_rows", "nf4_write", "cast"]
            .map(|name| parameters(source, name).map(|found| found.len()));
        assert_eq!(counts, [Some(3), Some(1), Some(1), Some(2), None]);
    }

    #[test]
    fn parameters_have_their_names_and_kinds() {
        let source = "KERNEL all(T *y, const bf16 *__restrict__ x, const float (*rows)[2], long long stride, int,\n    \
            const __grid_constant__ Table table, float scale, unsigned long long key, unsigned count) { run(); }";
        let found = parameters(source, "all").expect("it is defined");
        let found: Vec<_> = found.iter().map(|parameter| (parameter.name.as_str(), parameter.kind)).collect();
        let expected = [
            ("y", Kind::Pointer),
            ("x", Kind::Pointer),
            ("rows", Kind::Pointer),
            ("stride", Kind::Long),
            ("", Kind::Int),
            ("table", Kind::Struct),
            ("scale", Kind::Float),
            ("key", Kind::Long),
            ("count", Kind::Int),
        ];
        assert_eq!(found, expected);
    }
}
