//! A web server for tests, on this machine.
//!
//! Trade-off: one request per connection, no TLS.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};

/// A request.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// GET, HEAD, POST or PUT.
    pub method: String,
    /// Path and query.
    pub target: String,
    /// The lines of the head in lower case.
    pub head: String,
    /// The body.
    pub body: Vec<u8>,
}

impl Request {
    /// Returns the value of a header, in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    }
}

/// A response.
#[derive(Debug, Clone)]
pub struct Answer {
    status: u16,
    head: Vec<(String, String)>,
    body: Vec<u8>,
    /// Number of body bytes to send before the connection ends.
    pub sent: usize,
}

impl Answer {
    /// Creates a status and a body.
    pub fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        let body = body.into();
        Self { status, head: Vec::new(), sent: body.len(), body }
    }

    /// Adds a header. With "transfer-encoding", the body is sent as one chunk, without its length.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Into<String>) -> Self {
        self.head.push((name.to_owned(), value.into()));
        self
    }

    /// Builds the response with the range of the body that a request asks for.
    pub fn ranged(request: &Request, body: &[u8]) -> Self {
        let range = request.header("range").and_then(|range| range.strip_prefix("bytes="));
        let Some((begin, end)) = range.and_then(|range| range.split_once('-')) else { return Self::new(200, body) };
        let begin: usize = begin.parse().unwrap_or(0);
        let end = end.parse::<usize>().map_or(body.len(), |end| (end + 1).min(body.len()));
        if begin >= end {
            return Self::new(416, "");
        }
        let range = format!("bytes {begin}-{}/{}", end - 1, body.len());
        Self::new(206, &body[begin..end]).with("content-range", range)
    }
}

/// A server that responds by a function, and the log of its requests.
#[derive(Debug)]
pub struct Server {
    /// `http://127.0.0.1:PORT`.
    pub address: String,
    /// The requests so far.
    pub log: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    /// Creates a server at a free port.
    ///
    /// # Panics
    /// No port is free.
    pub fn new(answer: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> Self {
        Self::at("127.0.0.1:0", answer)
    }

    /// Creates a server at this address.
    ///
    /// # Panics
    /// The address is taken.
    pub fn at(address: &str, answer: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind(address).expect("the address is free");
        let address = format!("http://{}", listener.local_addr().expect("it is bound"));
        let log = Arc::new(Mutex::new(Vec::new()));
        let (written, answer) = (Arc::clone(&log), Arc::new(answer));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (written, answer) = (Arc::clone(&written), Arc::clone(&answer));
                // A client that disconnects early does not matter to the server.
                std::thread::spawn(move || drop(serve(stream, &*answer, &written)));
            }
        });
        Self { address, log }
    }

    /// Returns the requests so far, as method and target.
    pub fn requests(&self) -> Vec<String> {
        let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        log.iter().map(|request| format!("{} {}", request.method, request.target)).collect()
    }
}

fn serve(
    mut stream: TcpStream,
    answer: &(dyn Fn(&Request) -> Answer + Send + Sync),
    log: &Mutex<Vec<Request>>,
) -> std::io::Result<()> {
    let mut head = String::new();
    let mut reader = BufReader::new(stream.try_clone()?);
    while !head.ends_with("\r\n\r\n") {
        if reader.read_line(&mut head)? == 0 {
            return Ok(());
        }
    }
    let mut words = head.split(' ').map(str::to_owned);
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let mut request = Request { method, target, head: head.to_ascii_lowercase(), body: Vec::new() };
    if request.header("expect").is_some() {
        stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
    }
    request.body = body(&request, &mut reader)?;
    let answer = answer(&request);
    let is_head = request.method == "HEAD";
    log.lock().unwrap_or_else(PoisonError::into_inner).push(request);
    write!(stream, "HTTP/1.1 {} X\r\nconnection: close\r\n", answer.status)?;
    let is_chunked = answer.head.iter().any(|(name, _)| name == "transfer-encoding");
    if !is_chunked {
        write!(stream, "content-length: {}\r\n", answer.body.len())?;
    }
    for (name, value) in answer.head {
        write!(stream, "{name}: {value}\r\n")?;
    }
    stream.write_all(b"\r\n")?;
    if is_head {
        return Ok(());
    }
    if is_chunked {
        write!(stream, "{:x}\r\n", answer.body.len())?;
    }
    stream.write_all(&answer.body[..answer.sent])?;
    if is_chunked && answer.sent == answer.body.len() { stream.write_all(b"\r\n0\r\n\r\n") } else { Ok(()) }
}

/// Reads the body of a request, of known length or in chunks.
fn body(request: &Request, reader: &mut impl BufRead) -> std::io::Result<Vec<u8>> {
    let mut body = Vec::new();
    if request.header("transfer-encoding") == Some("chunked") {
        loop {
            let mut line = String::new();
            reader.read_line(&mut line)?;
            let size = u64::from_str_radix(line.trim(), 16).map_err(std::io::Error::other)?;
            reader.by_ref().take(size).read_to_end(&mut body)?;
            reader.read_line(&mut line)?;
            if size == 0 {
                return Ok(body);
            }
        }
    }
    let length = request.header("content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
    reader.take(length).read_to_end(&mut body)?;
    Ok(body)
}
