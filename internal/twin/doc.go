// Package twin runs random programs for the two ends of a connection, over TCP and over
// rdmanet, and checks that both do what the contract of net.Conn permits.
//
// A [Program] has the operations of each end: writes and reads of all kinds, messages,
// half-close, Close at any moment, deadlines that are set, moved and expire, and pauses. The
// memory may be that of a file, which may have been cut short. An end may write everything before
// it reads anything. The second end may have a process of its own, which ends without Close, or is
// stopped for a while. A program also has the [Link] between the ends, which delays, limits the
// rate, stops for a while or is cut. [Generate] makes a program from a seed, and
// [Program.GoString] prints it as Go code.
//
// [Run] runs a program and records a [Trace]: each call with its times, its result, and
// whether the bytes were right. [Judge] compares a trace with the contract. It is a pure
// function, and the same for both networks. The table in exempt.go lists where one of them
// may do less than the contract requires. [Shrink] makes a program that fails smaller.
//
// Only the public interface of rdmanet is used. One end may also be an SMB Direct peer that
// is not rdmanet, or one that sends a malformed message (package smbdpeer).
package twin
