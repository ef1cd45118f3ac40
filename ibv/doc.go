// Package ibv has the verbs as Go interfaces and plain structs: devices, protection
// domains, memory regions, completion queues, queue pairs and connection management. It has
// no C and does no I/O. The devices are packages of their own; ibv/iwarp is the software
// device.
//
// # From nothing to a message
//
//	provider --Resolve--> ID --CreateQP--> QP     (active side)
//	provider --Listen--> Listener --Accept--> ID  (passive side)
//
// An ID is one end of a connection that will be made, see rdma_cm(7). It names the device
// that serves the address. The protection domain and the completion queues are created on
// that device. A queue pair is created on the ID, and receives are posted. Then Connect or
// Accept makes the connection.
//
// # Datagrams
//
// Devices with [CapUD] also send datagrams without a connection. They use the same objects
// in the port space of UDP:
//
//	provider --BindUD--> ID --CreateQP--> QP           (once)
//	provider --ResolveUD--> ID --Connect--> UDParam    (once a peer)
//	provider --ListenUD--> Listener --Accept--> ID     (tells others of the QP)
//	PD --CreateAH--> AH                                (once a peer)
//
// A datagram to the peer then names the AH, and the peer's queue pair and key from UDParam.
// A datagram that is received has what an answer needs, see [PD.CreateAHFromWC].
//
// Devices with [CapMulticast] also send to groups. [ID.JoinMulticast] returns the UDParam
// of a group.
//
// # Rules for devices
//
// A device reports the rules that it is known to break in [Quirks].
//
//   - Posting never blocks and never waits for the peer.
//   - Requests of the send queue complete in the order in which they were posted:
//     sends, RDMA Reads and RDMA Writes. Receives complete in their own order of
//     posting. An unsignaled request that succeeds leaves no completion. One that
//     fails leaves one.
//   - The completion of an RDMA Write does not say that the peer can see the data.
//     The order in which data is placed in the peer's memory is not defined either.
//     The peer may use the data when a send has arrived there that was posted to
//     the same queue pair behind the Write: the message does not overtake it.
//   - A buffer belongs to the device from the post until its completion is
//     polled, except an inline send, whose buffers are free when PostSend
//     returns.
//   - A queue pair in the error state completes all that is posted with
//     [WCFlushErr].
//   - The keys of a region work with every queue pair of its domain, and with no
//     other. The remote key of a region of [QP.RegMR] works only with that queue
//     pair.
//   - Objects are released children first: QP, then CQ, MR and AH, then PD. The
//     other order is refused with an error that matches [ErrBusy].
//
// A queue pair may implement more interfaces than [QP], see [IdleQP] and [PollPayer].
//
// If a device lacks something (see [DeviceAttr]), the call fails with an error that matches
// [errors.ErrUnsupported].
package ibv
