//go:build linux

// Soak keeps connections of all kinds in motion for as long as it is told to, breaks what
// can break, and fails when a byte is wrong, when a stream comes to its end early or does
// not arrive after Close, when a connection fails that nothing was done to (one is excused for
// each that was given up after Close, as processors were lacking), when a process
// ends that was not killed, or when memory, descriptors, goroutines or registered bytes have
// not come back in the end.
//
// One process, home, serves and dials. Others, the peers, do the same and are killed and
// started anew. Every connection begins with a header that says what it is for; its bytes
// follow from a seed and the place in the stream, so that either end can check them.
package main
