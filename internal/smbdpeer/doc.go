// Package smbdpeer has SMB Direct peers for tests, written after [MS-SMBD] and on top of
// package ibv alone: it shares no code with rdmanet.
//
// A [Peer] is a plain one. It negotiates, keeps receives posted, counts credits, cuts messages
// into segments and joins what comes. It keeps all that arrives in memory until [Peer.Read]
// takes it, and grants receives again at once, so that the other end is never held up for want
// of credits. [Peer.Post] puts any bytes on the wire.
//
// A [Raw] peer does nothing by itself. A test says which messages it sends and when, right or
// wrong ones, and looks at each that comes. It has words for the extensions that
// docs/protocol.md describes: flags, private data, and the transfer header.
//
// [MS-SMBD]: https://learn.microsoft.com/en-us/openspecs/windows_protocols/ms-smbd/
package smbdpeer
