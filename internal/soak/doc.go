//go:build linux

// Soak uses connections of all kinds for as long as it is told to, and breaks what can
// break. It fails
//
//   - when a byte is wrong;
//   - when a stream ends early, or does not arrive after Close;
//   - when a connection fails without a reason (for each connection that was given up after
//     Close, because there were no processors, one failure is excused);
//   - when a process ends that was not killed;
//   - when memory, descriptors, goroutines or registered bytes have not been given back at
//     the end.
//
// One process, home, serves and dials. Other processes, the peers, do the same, and are
// killed and started anew. Every connection begins with a header, which has its kind. Its
// bytes depend on a seed and the place in the stream, so that either end can check them.
package main
