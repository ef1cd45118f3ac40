// Package udconn is the engine of datagrams: package rdmanet's PacketConn without its
// documentation and without *net.OpError. It sends and receives over UD queue pairs of RDMA
// devices, over a UDP socket, or over both at the same port.
//
// The files form layers; each names only what lies above it in this list:
//
//	settings, stats            the numbers that the caller sets and gets
//	address, wire, errors      the rules of addresses, and the formats; no locks
//	shared                     what all parts of a Conn have in common
//	inbox, receiver, sender    datagrams that wait for readers; goroutines that wait
//	recvqueue, sendqueue       the halves of a queue pair
//	groupset, queuepair        one UD queue pair on one port of a device
//	queuepairs                 all queue pairs of a Conn
//	peer, peertable            addresses, and the paths to them
//	udp*                       the UDP socket
//	rdmagroups, groups         multicast groups
//	resolver, responder        requests for the queue pair that serves an address, and replies
//	dispatch                   the device by which a datagram leaves
//	rdma, conn, open           the parts together
//
// Locks are taken in this order: groups.mu, queuePairs.opening, receiver.mu, sender.mu,
// peerTable.mu. No datagram takes the first two.
package udconn
