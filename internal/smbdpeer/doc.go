// Package smbdpeer has SMB Direct peers for tests. They are written from [MS-SMBD], use
// package ibv only, and share no code with rdmanet.
//
// A [Peer] is a plain peer. It negotiates, keeps receives posted, counts credits, cuts
// messages into segments, and joins the segments that it receives. It keeps all that
// arrives in memory until [Peer.Read] takes it, and grants the receives again at once. So
// the other end never waits for credits. [Peer.Post] sends any bytes.
//
// A [Raw] peer does nothing by itself. A test decides which messages it sends and when,
// right or wrong ones, and checks each that arrives. It has functions for the extensions
// that docs/protocol.md describes: flags, private data, and the transfer header.
//
// [MS-SMBD]: https://learn.microsoft.com/en-us/openspecs/windows_protocols/ms-smbd/
package smbdpeer
