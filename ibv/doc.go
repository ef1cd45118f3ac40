// Package ibv is the verbs model in Go's terms: interfaces and plain structs
// for devices, protection domains, memory regions, completion queues, queue
// pairs and connection management. It holds no C and does no I/O; the devices
// live in packages of their own (ibv/iwarp is the software device).
//
// # From nothing to a message
//
//	provider --Resolve--> ID --CreateQP--> QP     (active side)
//	provider --Listen--> Listener --Accept--> ID  (passive side)
//
// An ID is one end of a connection that is to be, as rdma_cm(7) has it. It
// names the device that serves the address; protection domain and completion
// queues come from that device. A queue pair is created on the ID, receives
// are posted, and then Connect or Accept brings the connection up.
//
// # Datagrams
//
// Devices with [CapUD] also send datagrams without a connection, by the same
// objects in the port space of UDP:
//
//	provider --BindUD--> ID --CreateQP--> QP           (once)
//	provider --ResolveUD--> ID --Connect--> UDParam    (once a peer)
//	provider --ListenUD--> Listener --Accept--> ID     (tells others of the QP)
//	PD --CreateAH--> AH                                (once a peer)
//
// A datagram to the peer then names the AH and, from UDParam, the peer's queue
// pair and key. Every datagram that is received brings what an answer needs; see
// [PD.CreateAHFromWC].
//
// Those with [CapMulticast] send to groups, too: [ID.JoinMulticast] returns the
// UDParam of one.
//
// # Rules that every device keeps
//
// What a device is known to do against the rules it says itself: see [Quirks].
//
//   - Posting never blocks and never waits for the peer.
//   - Sends complete in the order they were posted, receives likewise. An
//     unsignalled send that succeeds leaves no completion; one that fails does.
//   - A buffer belongs to the device from the post until its completion is
//     polled, except an inline send, whose buffers are free when PostSend
//     returns.
//   - A queue pair in the error state completes all that is posted with
//     [WCFlushErr].
//   - A region's keys work in its domain only, with every queue pair there; the
//     remote key of a region made by [QP.RegMR] with that one.
//   - Objects are released children first: QP, then CQ, MR and AH, then PD. The
//     other order is refused with an error that matches [ErrBusy].
//
// A queue pair may have more than [QP] asks for: see [IdleQP].
//
// What a device lacks (see [DeviceAttr]) is refused with an error that matches
// [errors.ErrUnsupported].
package ibv
