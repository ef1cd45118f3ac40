// Package twin runs random programs for the two ends of a connection, over TCP and over
// rdmanet, and checks that both do what the contract of net.Conn permits.
//
// A [Program] says what each end does: writes and reads of all kinds, messages, half-close,
// Close at any moment, deadlines that are set, moved and expire, pauses. It also says what
// lies between the ends: a [Link] that delays, limits the rate, stops for a while or is cut.
// [Generate] makes a program from a seed, and [Program.GoString] prints it as Go code.
//
// [Run] runs a program and records a [Trace]: each call with its times, its result and
// whether the bytes were the right ones. [Judge] holds a trace against the contract. It is
// a pure function, and is the same for both networks; where one of them is allowed less
// than the contract asks, the table in exempt.go says so. [Shrink] makes a program that
// fails smaller.
//
// Only the public interface of rdmanet is used. One end may also be an SMB Direct peer that
// is not rdmanet, or one that sends a malformed message (package smbdpeer).
package twin
