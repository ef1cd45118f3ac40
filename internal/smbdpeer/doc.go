// Package smbdpeer is an SMB Direct peer for tests, written after [MS-SMBD] and on top of
// package ibv alone: it shares no code with rdmanet and knows none of its extensions.
//
// It negotiates, keeps receives posted, counts credits, cuts messages into segments and
// joins what comes. [Peer.Post] puts any bytes on the wire, malformed messages included.
//
// The peer keeps all that arrives in memory until [Peer.Read] takes it, and grants receives
// again at once, so that the other end is never held up for want of credits.
//
// [MS-SMBD]: https://learn.microsoft.com/en-us/openspecs/windows_protocols/ms-smbd/
package smbdpeer
