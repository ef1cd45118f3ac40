// Package rdmanet carries the byte streams of package net over RDMA queue
// pairs. A server moves to it by one line:
//
//	ln, err := rdmanet.Listen("rdma", ":7777") // was: net.Listen("tcp", ":7777")
//	if err != nil {
//		// handle error
//	}
//	for {
//		conn, err := ln.Accept()
//		if err != nil {
//			// handle error
//		}
//		go handle(conn)
//	}
//
// and so does a client:
//
//	conn, err := rdmanet.Dial("rdma", "server.example:7777") // was: net.Dial("tcp", ...)
//	if err != nil {
//		// handle error
//	}
//	fmt.Fprintf(conn, "hello\n")
//
// What comes back is a net.Listener and a net.Conn with all that their users
// count on: deadlines, half-close, several goroutines at once, io.EOF at the
// end and *net.OpError around every other error. So it can be handed to
// net/http, gRPC, crypto/tls or a multiplexer as it is:
//
//	http.Serve(ln, handler)
//	http.Transport{DialContext: rdmanet.DialContext}
//
// # Networks and addresses
//
// The networks are "rdma", "rdma4" (IPv4 only) and "rdma6" (IPv6 only). "tcp",
// "tcp4" and "tcp6" mean the same three, for code that passes a network of its
// own choice to the function it was given; they never mean plain TCP.
//
// Addresses are those of TCP, since that is the port space in which RDMA
// connections are named: LocalAddr, RemoteAddr and Addr return *net.TCPAddr.
// [Conn.Info] tells what RDMA adds to that: device, port, queue pair number,
// GIDs, path MTU, and the extensions that were agreed with the peer.
//
// # Devices
//
// A device is what carries queue pairs. On Linux those of rdma-core are used,
// RDMA adapters as well as Soft-RoCE and siw, if the program was built with cgo
// and the machine has any. The one that is always there speaks iWARP (RFC 5040,
// 5041 and 5044) over TCP in software: it is called "iwarp", works on every
// system that Go runs on and needs no privileges.
//
// Dial takes the RDMA device that leads to an address, and the software device
// on the same port where there is none or nobody answers; a Listener listens on
// both. [Config].Device names the device that must be used, and the environment
// variable RDMANET_DEVICE overrides it; [Config].RequireRDMA forbids the
// software device. A connection of the software device between two processes of
// one Linux host begins with TCP and goes on through shared memory, unless
// [Config].SameHost or the environment variable RDMANET_SAMEHOST says "off" at one
// end. [Info].Link tells. Package ibv has the interfaces that a device implements.
//
// # The protocol
//
// Connections speak SMB Direct 1.0 as [MS-SMBD] specifies it: a negotiation,
// then messages, cut into segments that fit the peer's receive buffers and sent
// only against credits that the peer granted. Two ends that are both this
// package recognise each other when they connect and then have half-close too.
// docs/protocol.md in the repository has the bytes.
//
// # Messages
//
// [Conn.WriteMsg] and [Conn.ReadMsg] keep the boundaries of messages, for
// programs that want them instead of a stream. Options send a message in other
// ways: ahead of what waits to be sent ([Expedited]), in pieces
// ([Partial]), with a hint that no answer is expected ([NoResponse]), without
// blocking ([NonBlocking], [Conn.Writable]), and so that it takes back a memory key of
// the peer's ([Invalidate]). [Conn.QueueMsg] queues a message, to learn
// of its completion later or to cancel it before. [Conn.ReadPiece] reads pieces, and
// returns how they were sent. Both ends must be this package for most of it: [Extensions]
// says what was agreed, and each option what remains of it with other peers.
//
// Sends take turns in the order in which they are made, whatever makes them,
// expedited ones before normal ones. docs/semantics.md in the repository has all
// rules.
//
// # Datagrams
//
// [ListenPacket] returns a net.PacketConn, and Dial on "udp", "udp4" and "udp6" one
// that is connected:
//
//	p, err := rdmanet.ListenPacket("udp", ":7777") // was: net.ListenPacket("udp", ":7777")
//
// Over RDMA devices they use UD queue pairs, which iWARP devices do not have; over the
// software device they are UDP. Their addresses are *net.UDPAddr. [PacketConn] tells
// what holds for them: above all that they are never fragmented, so that
// [PacketConn.MaxDatagramSize] counts. Who has many at a time takes
// [PacketConn.WriteBatch] and [PacketConn.ReadBatch], which cost less a datagram.
//
// [ListenMulticast] and [PacketConn.JoinGroup] hear IP multicast groups: over the software
// device UDP's, over RoCE those of IPv4, on iWARP devices none. A group is written to
// as any address is.
//
// # Memory and buffers
//
// A buffer that is passed to Read or Write belongs to the package only until
// the call returns, also when it returns early because of a deadline. Data that
// Write took is sent even if Close follows at once, as long as the peer takes it:
// see [Config].LingerTimeout. Close does not wait for that, [Conn.CloseContext] does.
//
// Each connection owns receive buffers. There are few of them while it is idle
// and more while its peer sends, up to [Config].MaxReceiveCredits buffers of
// [Config].MaxReceiveSize bytes.
//
// What is large goes by RDMA between two rdmanet ends: the devices move it from
// memory to memory, and no segments are cut. It does so from [Alloc]'s memory, from
// memory that the program has mapped itself and made known by [RegisterMemory], and
// on RDMA devices from any memory; [Config].TransferSize says from which length on,
// and must be set for software devices on Linux.
// Such a Write returns when the peer has taken the data, so until then its memory
// is in use. A Read with room for 512 KiB has it put straight there; smaller ones,
// and [Conn.WriteTo], go through memory that [Config].TransferMemory bounds.
//
// # When the peer is gone
//
// A peer's process that ends closes its connections, or its system does. When
// nothing can come any more, because a cable is cut or a host is without power,
// Read and Write on both sides fail with an error that is a timeout and matches
// syscall.ETIMEDOUT, idle or blocked, within the time that [Config].KeepAlive says:
// 140 s unless it is set. Deadlines end a call sooner, and leave the connection.
//
// A RoCE or InfiniBand device that waits for an acknowledgement gives up by itself
// before that, with the same error: by default after seven times 0.54 s, four times
// as long at most (rdmacore.Config.AckTimeout and Retries). Over iWARP that is left to
// TCP, which on Linux gives up after some 15 minutes. Both hold with keep-alive off,
// too; an idle connection then stays for ever, as TCP's do. Where either program does
// not read, keep-alive on siw needs a peer that serves RDMA Reads, as most do.
//
// A peer's process that is stopped, by a debugger or with its container, is not gone. On
// the software device of Linux its connections stay as long as TCP's, because the kernels
// answer each other. On RDMA devices the process itself has to answer.
//
// # What it does not do
//
// There are no file descriptors behind the connections, so assertions to
// *net.TCPConn or syscall.Conn do not hold. RDMA has no encryption of its own;
// put crypto/tls on top where the network is not trusted.
//
// [MS-SMBD]: https://learn.microsoft.com/en-us/openspecs/windows_protocols/ms-smbd/
package rdmanet
